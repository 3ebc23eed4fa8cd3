"""The HTTP service: protocol, lifecycle, routes, and the handler of `POST /predict`."""
