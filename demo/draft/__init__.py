"""An EAGLE-3 draft head for a Llama, trained on the model's own answers."""
