"""An engine without a model: tokens by formula, passes that take modelled time."""
