"""What is promised of live drift: how seldom its detector is wrong, and how soon it is right."""
