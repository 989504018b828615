"""What of this machine and installation helps or hinders: every line looked at, not looked up."""
