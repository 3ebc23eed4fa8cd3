"""What a run of `qualms score` reports: false discoveries, the summary, and the page of --html."""
