"""The report of a run of `qualms score`: false discoveries, the summary, and the page of --html."""
