"""The last release: what an upgrade must work beside, and whose numbers may only fall."""

NAME = "0.1.0"
COMMIT = "c4646600d421"
