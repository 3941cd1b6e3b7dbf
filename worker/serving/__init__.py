"""Steps of a request that both roles share: claim the job, check it, allocate blocks, send tokens, clean up."""
