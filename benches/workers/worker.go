// A worker with an empty effect, behind HTTP: worker PORT
package main

import (
	"io"
	"log"
	"net/http"
	"os"
)

func main() {
	handle := func(response http.ResponseWriter, request *http.Request) {
		if _, err := io.ReadAll(request.Body); err != nil {
			response.WriteHeader(http.StatusInternalServerError)
		}
	}
	log.Fatal(http.ListenAndServe("127.0.0.1:"+os.Args[1], http.HandlerFunc(handle)))
}
