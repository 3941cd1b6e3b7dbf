"""Additional parts of layers: those beside a mixer and an MLP on one residual stream."""
