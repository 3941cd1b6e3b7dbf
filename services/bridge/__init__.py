"""The bridge of a worker's host to its other ones, which the first process of each host starts."""
