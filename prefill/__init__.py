"""The prompt role: pull a job, compute its KV in chunks, ship the blocks, hand the sequence to a decode worker."""
