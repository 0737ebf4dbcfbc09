"""Tasks: prompts, data and graders, one file a task."""
