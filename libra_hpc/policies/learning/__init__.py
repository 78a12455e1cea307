"""When learning breaks: judged from the numbers of every step."""
