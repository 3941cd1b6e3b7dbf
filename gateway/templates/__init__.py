"""Chat templates: conversations rendered in a sandbox, in a child process unless the template is known to be cheap."""
