"""Shared memory that clients have registered: their files in /dev/shm, which they may change at any moment."""
