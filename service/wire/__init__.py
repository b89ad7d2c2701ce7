"""Protocol messages from and to arrays: what a request asks for, checked, and what a response says."""
