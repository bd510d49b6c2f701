"""Models that no library provides in the needed form: ordinary modules that do not depend on Evener's runs."""
