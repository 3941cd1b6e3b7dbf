"""The forward pass: layer kinds that compute a spec on the residual stream."""
