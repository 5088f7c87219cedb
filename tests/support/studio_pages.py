"""The page of the studio in Chromium: what a visitor does there, and requests that are held back."""


def generate(page, images):
    """Press Generate and wait for a number of images."""
    page.click("#generate")
    page.wait_for_function(f"document.querySelectorAll('#images .grid img').length === {images}")


def choose(page, box, text):
    """Type into a dropdown and accept it."""
    page.fill(f"{box} input", text)
    page.keyboard.press("Enter")


class Held:
    """Events that are kept from the server: those whose data ``chosen`` picks, from now until the release."""

    def __init__(self, page, chosen):
        self.chosen, self.routes, self.released = chosen, [], False
        page.route("**/queue/join*", self._handle)

    def _handle(self, route):
        if not self.released and self.chosen(route.request.post_data_json["data"]):
            self.routes.append(route)
        else:
            route.continue_()

    def release(self):
        """Send the events, the newest first: each arrives before the next one is sent."""
        self.released = True
        for route in reversed(self.routes):
            route.continue_()
            route.request.response()
