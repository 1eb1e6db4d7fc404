"""Why a plan is as it is: runners-up, neighbours, what more memory or faster links would buy."""
