"""The Python client of the service: `qualms.Client` and `qualms.AsyncClient`. It needs httpx and pydantic alone."""
