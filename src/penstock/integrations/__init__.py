"""Other systems: Gearman, Rickover's downstream worker, Jobber's route."""
