"""The application ``troll``: command line, tasks, models, training, run folders, report."""
