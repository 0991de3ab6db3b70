"""`python -m kvd.service`: the daemon."""

from kvd.service.main import run

if __name__ == "__main__":
    run()
