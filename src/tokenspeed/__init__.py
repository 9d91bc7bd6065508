"""TokenSpeed: an LLM inference server whose forward pass can be edited while it runs."""

__version__ = "0.1.0"
