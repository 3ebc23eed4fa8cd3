"""What this process may use of its machine: cores, memory and priority, within the limits of its cgroup."""
