"""One worker of both roles under load: first tokens, pace of streams, goodput."""
