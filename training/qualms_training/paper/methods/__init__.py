"""The methods of the tables, one file each; the paper's ablations share one."""
