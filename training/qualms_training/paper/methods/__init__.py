"""The methods of the tables, one file each."""
