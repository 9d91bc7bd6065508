"""Wrappers of vendors' libraries, none of which is needed: they register solutions where the library is installed.

The wrappers can be edited and reloaded as all kernels can; the libraries themselves stay as they were loaded.
"""

from __future__ import annotations

import importlib.util

FLASH_ATTN_INSTALLED = importlib.util.find_spec("flash_attn_interface") is not None

if FLASH_ATTN_INSTALLED:
    from tokenspeed_kernel.thirdparty import flash_attn as _flash_attn  # noqa: F401
