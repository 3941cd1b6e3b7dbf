"""One pass of the model: packing, launching, captured graphs, results."""
