"""The process that CPU workers of `baton up` are forked of."""
