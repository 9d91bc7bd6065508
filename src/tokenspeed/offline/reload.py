"""The control call `reload_forward`, made from keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.calls import Reload
from tokenspeed.runtime.protocol.refusals import reload_failure
from tokenspeed.server.reloads import ReloadRequest


def reload_request(number: int, fields: Mapping[str, Any]) -> Reload | dict[str, Any]:
    """The message with the call number `number`; for fields that cannot be right the reply that says so."""
    try:
        request = msgspec.convert(fields, ReloadRequest)
        request.check()
    except (msgspec.ValidationError, RequestError) as error:
        return reload_failure(str(fields["id"]), "bad_request", "queue", str(error))
    return Reload(call=number, **msgspec.structs.asdict(request))
