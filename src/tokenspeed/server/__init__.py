"""The front process of one engine: gRPC service, HTTP control app, request journal; never imports torch."""
