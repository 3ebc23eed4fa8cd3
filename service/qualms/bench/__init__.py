"""`qualms bench`: the speed of the service relative to the machine's limit and to a plain FastAPI server."""
