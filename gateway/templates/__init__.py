"""Chat templates: conversations as text, in a sandbox, and in a child process where a template is not known to be cheap."""
