"""`qualms toy-figure`: the toy figure of the paper."""
