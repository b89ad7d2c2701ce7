"""Shared memory that clients have registered: files in /dev/shm, which clients can change at any moment."""
