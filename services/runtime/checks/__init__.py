"""Start-up checks: functions that return findings. `baton up` refuses to start by them, `baton doctor` prints them."""
