"""What layers have beside a mixer and an MLP on one residual stream."""
