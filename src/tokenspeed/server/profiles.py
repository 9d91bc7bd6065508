"""What clients ask of the profiler, from the control app and from the gateway."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from smg_grpc_proto.generated import common_pb2 as common

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.calls import ProfileActivity

DIRECTORY_VARIABLE = "TOKENSPEED_PROFILER_DIR"
"""Environment variable with the directory of profiles that name none; without it that is the temporary directory."""

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /start_profile`, as SGLang has it; null is as good as leaving a field out."""

    output_dir: str | None = None
    """Directory for the files; null is `$TOKENSPEED_PROFILER_DIR`, else the temporary directory."""
    start_step: int | None = None
    """Number of the first step to record, counted from the start of the server; a past one means the next."""
    num_steps: int | None = None
    """End after so many steps; null goes on until `stop_profile`."""
    activities: tuple[ProfileActivity, ...] | None = None
    """`CPU`, `GPU`, `MEM` or `CUDA_PROFILER`; null is all that the torch profiler has on this device."""
    with_stack: bool | None = None
    """Record Python stacks."""
    record_shapes: bool | None = None
    """Record the shapes of the operators' inputs."""
    profile_by_stage: bool | None = None
    """Record prefill steps and decode steps apart, `num_steps` of each."""
    profile_id: str | None = None
    """Begins the files' names; null is the time."""

    @classmethod
    def from_proto(cls, request: common.StartProfileRequest) -> ProfileRequest:
        """The same from the gateway.

        Raises:
            RequestError: for an activity that is not there.
        """
        optional = ("output_dir", "start_step", "num_steps", "with_stack", "record_shapes")
        fields = {name: getattr(request, name) for name in optional if request.HasField(name)}
        fields |= {"activities": tuple(request.activities), "profile_by_stage": request.profile_by_stage}
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"the profile is not what this call takes: {error}") from error

    def fields(self) -> dict[str, Any]:
        """The fields of `StartProfile`, with what the request leaves open filled in here, once for all ranks.

        Raises:
            RequestError: with one sentence that names the field.
        """
        if self.num_steps is not None and self.num_steps < 1:
            raise RequestError(
                f"num_steps must be 1 or more, not {self.num_steps}; leave it out to profile until a stop"
            )
        if self.start_step is not None and self.start_step < 0:
            raise RequestError(f"start_step must be 0 or more, not {self.start_step}")
        directory = self.output_dir or os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir()
        if "\0" in directory:
            raise RequestError("output_dir has a zero byte; give a directory's path")
        profile_id = self.profile_id or time.strftime("%Y%m%d-%H%M%S")
        if not FILE_NAME.fullmatch(profile_id):
            raise RequestError("profile_id becomes a file name; use up to 200 letters, digits, '.', '_' and '-'")
        return {
            "profile_id": profile_id,
            "output_dir": str(Path(directory).absolute()),
            "activities": tuple(dict.fromkeys(self.activities or ())),
            "start_step": self.start_step or 0,
            "num_steps": self.num_steps,
            "with_stack": bool(self.with_stack),
            "record_shapes": bool(self.record_shapes),
            "profile_by_stage": bool(self.profile_by_stage),
        }
