"""Steps of both roles for a request: claim its job, check it, give it blocks, send its tokens, forget it."""
