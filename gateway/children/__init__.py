"""Child processes for work that may take too much time or memory: how they are asked, and their bounds."""
