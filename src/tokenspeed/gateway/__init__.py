"""Starts the engine's front process and SMG, the gateway, and watches over both."""
