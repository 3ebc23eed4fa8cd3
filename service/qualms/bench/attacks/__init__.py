"""`qualms bench --attack`: a well-behaved client beside clients that try to exhaust the service."""
