"""Running a piece of a test on several threads at once."""

import threading


def run_in_threads(count, work):
    """Call `work(number)` on `count` threads that start together; raises the first exception of any of them."""
    failures = []
    start = threading.Barrier(count)

    def guarded(number):
        try:
            start.wait()
            work(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
