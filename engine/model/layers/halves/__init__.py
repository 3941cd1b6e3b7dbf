"""Steps of a layer other than its mixer and its MLP, and what they need at the two ends of a model."""
