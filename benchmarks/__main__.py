"""`python -m benchmarks COMMAND`: measure this library on the machine at hand."""

from benchmarks.app import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
