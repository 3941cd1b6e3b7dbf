"""Speed of models that pool, on a CPU beside other engines, on a GPU beside its arithmetic."""
