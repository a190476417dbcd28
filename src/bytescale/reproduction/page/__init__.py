"""The reproduction for readers: tables, pictures and the page of the docs."""
