"""A worker's processes on several hosts: what each host's shared memory says is said in the others', too."""
