"""OpenAI's Batch API: files, batches, and lines that all gateways share."""
