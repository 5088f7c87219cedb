"""Pages that show the method and the models: playground, images in the browser, and the studio."""
