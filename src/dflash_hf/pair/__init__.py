"""A target with its draft: loaded together, answering prompts, compared with the target alone."""
