"""The process that fetches one model for a gateway, which reads how far it is from its output."""
